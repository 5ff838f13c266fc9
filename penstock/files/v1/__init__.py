"""Generated wire modules; see protos/."""
