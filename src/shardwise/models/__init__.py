"""The models of GSPMD's case studies (section 5), annotated once, runnable on one device.

Each module has a frozen config, `PAPER` (the tables' rows with their published figures), `init`,
`abstract_params`, `loss`, and `STRATEGIES` that say which tensors are annotated and how.
"""

from shardwise.models import conformer as conformer
