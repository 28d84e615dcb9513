"""What a run would take, known without a GPU: decisions and arithmetic, without torch."""
