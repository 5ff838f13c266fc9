"""What a request is booked at, and whether that fits: the policies, and what they learn."""
