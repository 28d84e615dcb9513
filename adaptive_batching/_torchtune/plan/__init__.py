"""What would fit, known from a trace before anything is downloaded or run."""
