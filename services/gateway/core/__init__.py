"""The pure part of the gateway: what a batch is and how it moves."""
