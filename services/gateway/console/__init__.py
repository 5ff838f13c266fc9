"""The console: one page of the gateway on which people look at the fleet."""
