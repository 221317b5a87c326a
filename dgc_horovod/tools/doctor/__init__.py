"""`dgcrun --doctor`: problems of the installation and the hosts, and the speed of their links."""
