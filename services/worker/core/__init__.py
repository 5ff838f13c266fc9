"""The pure core of the worker: the session of one worker with queue and scheduler."""
