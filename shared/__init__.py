"""What both ends speak. Knows neither the edge's sources nor the cloud's engine."""
