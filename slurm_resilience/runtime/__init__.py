"""What keeps a run alive: the supervisor on the batch host, an agent on every node, a warm launcher under each agent."""
