"""The cost of policies on the user's machines, measured (``hvdbridge bench``) and predicted (``hvdbridge plan``)."""
