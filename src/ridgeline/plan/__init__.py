"""What speculation will bring, said before anything is loaded."""
