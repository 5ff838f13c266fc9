"""`python -m penstock` is the `penstock` command."""

from penstock.command import main

main()
