"""The OpenAI API's own words: what a body may hold (`shapes`), what it means (`meaning`), how answers are worded."""
