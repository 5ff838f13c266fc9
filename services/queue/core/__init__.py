"""The pure core of the queue: lifecycle table and state machine."""
