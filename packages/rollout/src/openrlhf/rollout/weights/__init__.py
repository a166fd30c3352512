"""Both ends of the weight transfer: wire format, sender, receiver."""
