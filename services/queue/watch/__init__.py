"""What clients are told: results after a cursor, and tokens while a request runs."""
