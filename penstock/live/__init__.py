"""What a live view of a fleet shows, made of what queue and scheduler say of themselves."""
