"""Batches of the gateway from their input file to their output files, whichever gateway drives them."""
