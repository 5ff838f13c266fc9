"""The queue's disk: the store and its health, starts, reads, backups and checks."""
