// Package planner computes from a Config a run's plan and the predicted time of a step. It also
// finds changes that make a plan fit, and the fastest configuration that fits. It opens no device
// and reads no weights; of the data it reads at most the first record, to detect conversations.
package planner
