"""Files and small records for gateways."""
