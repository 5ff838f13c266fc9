"""The pure core of the scheduler: ledger, channels, arbiter, policies."""
