"""Watching: metrics and logs. Takes plain figures from whoever has them; knows neither engine nor doors."""
