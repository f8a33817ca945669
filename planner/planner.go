// Package planner answers, from a Config alone, what a run takes: its plan, the predicted
// time of a step, what makes it fit where it does not, and the fastest configuration that
// fits. It opens no device, reads no weights and no data.
package planner
