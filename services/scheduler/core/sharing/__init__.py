"""How channels share the workers: whose turn it is, what each keeps and may take, and on which worker."""
