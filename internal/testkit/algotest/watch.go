package algotest

import (
	"time"

	"github.com/spillway-ml/spillway/comm/watch"
)

// Watch observes a job of world ranks at every interval until stop is closed or the job must end.
// read fills in the reports; act gets each verdict, in order.
func Watch(m *watch.Machine, world int, interval time.Duration, stop <-chan struct{}, read func([]watch.Report), act func(watch.Verdict)) {
	reports := make([]watch.Report, world)
	began := time.Now()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		read(reports)
		for _, v := range m.Observe(time.Since(began), reports) {
			act(v)
			if v.Kind == watch.End {
				return
			}
		}
		select {
		case <-stop:
			return
		case <-tick.C:
		}
	}
}
