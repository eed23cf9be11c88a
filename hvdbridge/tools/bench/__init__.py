"""What a policy costs on the user's own machines: measured (``hvdbridge bench``) and predicted (``hvdbridge plan``)."""
