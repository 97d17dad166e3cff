"""The native library: building it (:mod:`.builder`), finding and loading it (:mod:`.loader`)."""
