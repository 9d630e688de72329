"""One file a family of primitives: each primitive's factor rule and local code, side by side."""
