"""What the library nodes share: models, engines, training and its mathematics. No nodes here."""
