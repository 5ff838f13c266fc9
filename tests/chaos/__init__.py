"""Chaos on real processes: a batch runs while everything around it is killed, frozen, cut off and filled up."""
