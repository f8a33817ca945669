package training

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/graph"
)

// metricsOut writes a run's metrics to the outputs that were requested: JSON lines, TensorBoard's
// events and the page of --metrics-addr. It warns once of each that fails; the run continues.
type metricsOut struct {
	warn  func(string)
	lines *spillway.MetricsWriter
	board *boardFile
	page  *metricsPage
	told  map[string]bool
}

// open opens the outputs of a run; a resumed one appends after its completed steps.
func (m *metricsOut) open(t *spillway.Trainer, stderr io.Writer) (err error) {
	c, done := t.Config(), t.Done()
	m.told = map[string]bool{}
	if !c.Resume {
		done = -1
	}
	if c.Metrics != "" {
		if m.lines, err = spillway.OpenMetrics(c.Metrics, done); err != nil {
			return err
		}
		if strings.EqualFold(c.Device, "cuda") {
			m.lines.Outside = c.Outside[graph.Device]
		}
	}
	if c.TensorBoard != "" {
		if m.board, err = openBoard(c.TensorBoard, done); err != nil {
			return errors.Join(err, m.lines.Close())
		}
	}
	if c.MetricsAddr != "" {
		if m.page, err = serveMetrics(t); err != nil {
			return errors.Join(err, m.lines.Close(), m.board.close())
		}
		fmt.Fprintf(stderr, "metrics: %s\n", m.page.url)
	}
	return nil
}

// dropped returns the last step of a previous attempt of the run, or 0 if it is not known.
func (m *metricsOut) dropped() int {
	if m.lines == nil {
		return 0
	}
	return m.lines.Dropped()
}

func (m *metricsOut) step(r spillway.StepResult) {
	if m.lines != nil {
		m.tell("lines", m.lines.Step(r))
	}
	if m.board != nil {
		m.tell("board", m.board.step(r))
	}
	if m.page != nil {
		m.page.step(r)
	}
}

func (m *metricsOut) done(step int, sum string) {
	if m.lines != nil {
		m.tell("lines", m.lines.Done(step, sum))
	}
}

func (m *metricsOut) close() {
	m.tell("lines", m.lines.Close())
	m.tell("board", m.board.close())
	m.tell("page", m.page.close())
}

func (m *metricsOut) tell(what string, err error) {
	if err != nil && !m.told[what] {
		m.told[what] = true
		m.warn(fmt.Sprintf("%v; the run goes on without what can't be written", err))
	}
}
