package watch

import "time"

// Run observes the job at every interval until stop is closed or the job must end. read
// fills in the reports; act gets each verdict, in order.
func Run(m *Machine, stop <-chan struct{}, read func([]Report), act func(Verdict)) {
	reports := make([]Report, m.c.World)
	began := time.Now()
	tick := time.NewTicker(m.c.Interval)
	defer tick.Stop()
	for {
		read(reports)
		for _, v := range m.Observe(time.Since(began), reports) {
			act(v)
			if v.Kind == End {
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
