"""The services: queue, scheduler and worker, and what they share."""
