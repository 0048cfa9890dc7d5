"""Parts of cupyrec in other libraries' models; each file needs its library, an extra."""
