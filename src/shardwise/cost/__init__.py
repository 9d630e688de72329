"""What a plan costs, read from the per-device jaxpr: bytes on the wire, flops, memory."""
