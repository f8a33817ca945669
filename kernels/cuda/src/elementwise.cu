// Fills and elementwise sums: see bind_elementwise.go.
