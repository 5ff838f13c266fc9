"""Submits on their way to the disk: checked, bounded, in turns."""
