"""How much context and how large a chunk the devices have room for: arithmetic on measured bytes."""
