// Package powerloss holds tests alone: what is left of a training run's checkpoints
// when the power fails after any of its file operations, or when any one of them
// fails.
package powerloss
