"""What was done, for people: report, dumps, pictures, words."""
