"""What users and authors of backends test with: a simulator, a loop in virtual time, suites for stores."""
