"""Progress lines, TensorBoard, Weights & Biases."""
