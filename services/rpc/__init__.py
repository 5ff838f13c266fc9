"""gRPC plumbing shared by the services."""
