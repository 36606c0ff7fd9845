"""Who moves the bytes; one file each."""
