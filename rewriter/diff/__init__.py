"""Two models compared: are they one function, and where do they part?"""
