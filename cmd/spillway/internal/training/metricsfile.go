package training

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spillway-ml/spillway"
	"github.com/spillway-ml/spillway/graph"
)

// metricsOut is where a run's metrics go, as far as they were asked for: the JSON
// lines, TensorBoard's events, and who scrapes --metrics-addr. Each that fails is
// told once and does not end the run.
type metricsOut struct {
	warn  func(string)
	lines *spillway.MetricsWriter
	board *boardFile
	page  *metricsPage
	told  map[string]bool
}

// open opens the metrics of a run that has done so many steps already.
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

// dropped is the last step of another attempt of the run, 0 where none is known.
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
