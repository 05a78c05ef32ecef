"""The node daemon: owns lent memory and moves all bytes."""
