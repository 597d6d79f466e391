"""What each family's demo shows of its trained model."""
