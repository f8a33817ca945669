package main

import (
	"context"
	"fmt"

	"github.com/spillway-ml/spillway"
)

// metricsFile is a run's metrics, if it has any. What goes wrong with them is told
// once and does not end the run.
type metricsFile struct {
	w    *spillway.MetricsWriter
	warn func(string)
	told bool
}

// open opens the metrics of a run that has done so many steps already.
func (m *metricsFile) open(c spillway.Config, done int) (err error) {
	if c.Metrics == "" {
		return nil
	}
	if !c.Resume {
		done = -1
	}
	m.w, err = spillway.OpenMetrics(c.Metrics, done)
	return err
}

func (m *metricsFile) step(r spillway.StepResult) {
	if m.w != nil {
		m.tell(m.w.Step(r))
	}
}

func (m *metricsFile) done(step int, sum string) {
	if m.w != nil {
		m.tell(m.w.Done(step, sum))
	}
}

func (m *metricsFile) close() { m.tell(m.w.Close()) }

func (m *metricsFile) tell(err error) {
	if err != nil && !m.told {
		m.told = true
		m.warn(fmt.Sprintf("%v; the run goes on without what can't be written", err))
	}
}

// interrupted is the end that a signal asked for, in words for a person.
type interrupted struct{ text string }

func (e *interrupted) Error() string { return e.text }
func (e *interrupted) Unwrap() error { return context.Canceled }
