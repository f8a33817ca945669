package checkpoint

// expendable returns those of owner's checkpoints that Config.Keep does not cover, of
// entries in ascending order: all that are older than the newest keep confirmed
// ones, and unconfirmed ones older than the newest confirmed. keep 0 keeps all.
//
// Not counted as confirmed are those that the run left behind when it went on from
// an older one: they lie in a future that did not happen, and counting them would
// remove what the run writes now.
func expendable(entries []Entry, m *Marks, owner string, keep int) []Entry {
	if keep <= 0 || owner == "" {
		return nil
	}
	var own []Entry
	for _, e := range entries {
		if e.Err == nil && e.Manifest.Owner == owner {
			own = append(own, e)
		}
	}
	counts := func(e Entry) bool {
		key := e.Manifest.key()
		return m.confirmed[key] && !m.left[key]
	}
	var gone []Entry
	kept := 0
	for i := len(own) - 1; i >= 0; i-- {
		switch {
		case kept > 0 && kept < keep && counts(own[i]):
			kept++
		case kept > 0:
			gone = append(gone, own[i])
		case counts(own[i]):
			kept = 1
		}
	}
	return gone
}
