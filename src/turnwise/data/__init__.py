"""Data besides fresh rollouts: files of rows, demonstrations, replay buffers. Knows no loss and no engine."""
