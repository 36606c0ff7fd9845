"""One collective call, its arguments checked and its arrays flat."""
