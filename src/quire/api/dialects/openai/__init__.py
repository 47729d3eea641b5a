"""The OpenAI API: body schemas (`schemas`), their conversion to parameters (`fields`), response encoding (`writer`)."""
