// Package powerloss has only tests. They check which of a training run's checkpoints remain if the
// power fails after any of its file operations, or if any one of them fails.
package powerloss
